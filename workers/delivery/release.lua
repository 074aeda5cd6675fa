-- release: give back what a consumer holds, all but the entries it names.
--
-- KEYS  streams
-- ARGV  group, consumer, free, 1 to remove the consumer where it then holds nothing (else 0), 1 when these
--       claims are not to count as read (else 0), then `stream entry-id` of each entry to keep
-- out   number of entries given back
--
-- Serves three callers: an instance that gives back what it will not run soon, an instance that lost a
-- claim's reply (it keeps what it knows), a parent whose instance died (it keeps nothing).
-- A consumer is removed only in the same breath in which its pending list is seen to be empty: removing
-- it with entries pending would make them undeliverable.
-- First write: DEL, XCLAIM; a full server allows both (6.2 refuses XGROUP DELCONSUMER as a first write).
local group, consumer, free, remove, unread = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5] == '1'
local keep, released = {}, 0
for i = 6, #ARGV do keep[ARGV[i]] = true end
if remove then redis.call('DEL', KEYS[1] .. ':none') end

for _, stream in ipairs(KEYS) do
  local from, held = '-', 0
  while true do
    local page = redis.call('XPENDING', stream, group, from, '+', 500, consumer)
    for _, pending in ipairs(page) do
      if keep[stream .. ' ' .. pending[1]] then
        held = held + 1
      else
        local reads = unread and 0 or pending[4]
        redis.call('XCLAIM', stream, group, free, 0, pending[1], 'RETRYCOUNT', reads, 'JUSTID')
        released = released + 1
      end
    end
    if #page < 500 then break end
    from = '(' .. page[#page][1]
  end
  if remove and held == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer) end
end
return released
