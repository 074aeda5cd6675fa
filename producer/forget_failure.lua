-- forget_failure: delete the failures of some jobs, where results have a server of their own.
--
-- KEYS  results
-- out   per result 1, or 0 where there is an answer: that stays
--
-- First write: DEL; a full server allows it.
local out = {}
for i, key in ipairs(KEYS) do
  local stored = redis.call('GET', key)
  if stored and answered(stored) then
    out[i] = 0
  else
    redis.call('DEL', key)
    out[i] = 1
  end
end
return out
