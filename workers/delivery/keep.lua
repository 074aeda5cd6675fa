-- keep: store one large array of a reply, before the reply.
--
-- KEYS  the blob
-- ARGV  its elements, its life in seconds
-- out   1
--
-- First write: DEL; a full server allows it, and then allows the SET.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
