-- cancel: mark jobs that are not to be started; one that is answered already needs no mark.
--
-- KEYS  per job: its mark, its result, its fence
-- ARGV  life of a mark in seconds
-- out   per job: 1 marked | 0 answered before
--
-- First write: DEL; a full server allows it, and then allows the SET.
local out = {}
for i = 1, #KEYS, 3 do
  redis.call('DEL', KEYS[i])
  local open = redis.call('EXISTS', KEYS[i + 1], KEYS[i + 2]) == 0
  if open then redis.call('SET', KEYS[i], 1, 'EX', ARGV[1]) end
  out[#out + 1] = open and 1 or 0
end
return out
