-- forgive: take back the starts of a consumer's unfinished jobs, because we ended it, not they.
--
-- KEYS  the queue's journal
-- ARGV  consumer
-- out   number of starts taken back
--
-- First write: HDEL, or HSET after it; a full server allows HDEL, so it comes first and is made to.
local journal, consumer = KEYS[1], ARGV[1]
local records = redis.call('HGETALL', journal)
local forgiven = 0
for i = 1, #records, 2 do
  local stream, id, starts, holder = string.match(records[i + 1], '^(%S+) (%S+) (%d+) (.*)$')
  if holder == consumer and tonumber(starts) > 0 then
    forgiven = forgiven + 1
    redis.call('HDEL', journal, records[i])
    if tonumber(starts) > 1 then
      redis.call('HSET', journal, records[i], stream .. ' ' .. id .. ' ' .. (starts - 1) .. ' ' .. holder)
    end
  end
end
return forgiven
