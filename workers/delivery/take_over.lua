-- take_over: give back claims that nobody renewed for too long, and forget consumers that hold nothing.
--
-- KEYS  streams
-- ARGV  group, free, milliseconds without renewal after which a claim is dead,
--       milliseconds of silence after which an empty consumer is removed, until when this call is meant
--       (the server's clock, unix milliseconds)
-- out   number of claims given back
--
-- A call that is read too late does nothing: it may have lain in the socket of a server that stood still, and
-- then every claim looks dead, also those of workers that are about to renew them.
-- First write: DEL, XCLAIM; a full server allows both (6.2 refuses XGROUP DELCONSUMER as a first write).
local group, free, dead_ms, silent_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local taken = 0
local now = redis.call('TIME')
if now[1] * 1000 + now[2] / 1000 > tonumber(ARGV[5]) then return 0 end
redis.call('DEL', KEYS[1] .. ':none')

for _, stream in ipairs(KEYS) do
  local from = '-'
  while true do
    local page = redis.call('XPENDING', stream, group, 'IDLE', dead_ms, from, '+', 500)
    for _, pending in ipairs(page) do
      if pending[2] ~= free then
        redis.call('XCLAIM', stream, group, free, dead_ms, pending[1], 'JUSTID')
        taken = taken + 1
      end
    end
    if #page < 500 then break end
    from = '(' .. page[#page][1]
  end
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local about = {}
    for i = 1, #info, 2 do about[info[i]] = info[i + 1] end
    if about.name ~= free and about.pending == 0 and about.idle >= silent_ms then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, about.name)
    end
  end
end
return taken
