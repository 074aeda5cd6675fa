-- renew: start the time of every claim anew that the named consumers still hold.
--
-- KEYS  streams
-- ARGV  group, then consumers
-- out   number of claims renewed
--
-- Asks Redis what each consumer holds and renews that in the same script: an entry that was taken over
-- meanwhile is not stolen back. Writes also where nothing is held: whoever renews in vain knows that
-- nobody else could, and takes over nothing soon after.
-- First write: DEL, of nothing; a full server allows it.
local group, renewed = ARGV[1], 0
redis.call('DEL', KEYS[1] .. ':none')
for _, stream in ipairs(KEYS) do
  for i = 2, #ARGV do
    local from = '-'
    while true do
      local page = redis.call('XPENDING', stream, group, from, '+', 500, ARGV[i])
      if #page > 0 then
        local ids = {}
        for j, pending in ipairs(page) do ids[j] = pending[1] end
        ids[#ids + 1] = 'JUSTID'
        redis.call('XCLAIM', stream, group, ARGV[i], 0, unpack(ids))
        renewed = renewed + #page
      end
      if #page < 500 then break end
      from = '(' .. page[#page][1]
    end
  end
end
return renewed
