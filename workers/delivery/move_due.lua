-- move_due: put delayed jobs whose time has come into their streams.
--
-- KEYS  the queue's delayed set, then its streams from the first claimed to the last
-- ARGV  now (unix seconds), how many at most, then the priority names in the order of the streams
-- out   number of jobs moved
--
-- A member is the packed map of an entry's fields with its priority beside them.
-- First write: ZREM; a full server allows it, and then allows the XADD.
local delayed = KEYS[1]
local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(due) do
  redis.call('ZREM', delayed, member)
  local packed = cmsgpack.unpack(member)
  local stream = KEYS[#KEYS]
  for i = 3, #ARGV do
    if ARGV[i] == packed.priority then stream = KEYS[i - 1] end
  end
  local fields = {}
  for _, name in ipairs({'id', 'rows', 'env', 'body', 'raw'}) do
    if packed[name] then
      fields[#fields + 1] = name
      fields[#fields + 1] = packed[name]
    end
  end
  redis.call('XADD', stream, '*', unpack(fields))
end
return #due
