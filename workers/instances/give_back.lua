-- give_back: end the leases that a worker still holds of these.
--
-- KEYS  leases
-- ARGV  token of the worker
-- out   number of leases that ended
--
-- First write: DEL; a full server allows it.
local ended = 0
for _, key in ipairs(KEYS) do
  local lease = redis.call('GET', key)
  if lease and string.match(lease, '^%d+ ([^\t]*)') == ARGV[1] then
    ended = ended + redis.call('DEL', key)
  end
end
return ended
