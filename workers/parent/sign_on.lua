-- sign_on: say that a worker is there, what it does and which models it serves.
--
-- KEYS  the worker's status, the set of workers, the set of models
-- ARGV  node, status, its life in seconds, now, until when its models are known, the models
-- out   1
--
-- First write: ZREMRANGEBYSCORE; a full server allows it, and then allows the rest, which takes no
-- more room than what it replaces. The sets hold names by the time until which they count; a worker
-- that is gone is still told of for as long again.
local node, status, life, now, known = unpack(ARGV, 1, 5)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - life)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
redis.call('SET', KEYS[1], status, 'EX', life)
redis.call('ZADD', KEYS[2], now + life, node)
for i = 6, #ARGV do
  redis.call('ZADD', KEYS[3], known, ARGV[i])
end
return 1
