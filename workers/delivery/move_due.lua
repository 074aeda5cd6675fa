-- move_due: put delayed jobs whose time has come into their streams.
--
-- KEYS  the queue's delayed set, then its streams from the first claimed to the last
-- ARGV  now (unix seconds), how many at most, then the priority names in the order of the streams
-- out   number of jobs moved
--
-- A member is the packed map of an entry's fields with its priority beside them. One that cannot be read
-- goes on as it is, and whoever claims it makes a dead letter of it.
-- It is added before it is taken out, so that one that a stream refuses stays where it is.
-- First write: DEL, of nothing; a full server allows it, and then allows the XADD.
local delayed = KEYS[1]
redis.call('DEL', delayed .. ':none')

local function entry_of(member)
  local readable, packed = pcall(cmsgpack.unpack, member)
  if not readable or type(packed) ~= 'table' then return KEYS[#KEYS], {'rows', '1', 'raw', member} end
  local stream, fields = KEYS[#KEYS], {}
  for i = 3, #ARGV do
    if ARGV[i] == packed.priority then stream = KEYS[i - 1] end
  end
  for _, name in ipairs({'id', 'rows', 'env', 'body', 'blobs', 'raw'}) do
    local kind = type(packed[name])
    if kind == 'string' or kind == 'number' then
      fields[#fields + 1] = name
      fields[#fields + 1] = packed[name]
    end
  end
  if #fields == 0 then fields = {'rows', '1', 'raw', member} end
  return stream, fields
end

local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(due) do
  local stream, fields = entry_of(member)
  redis.call('XADD', stream, '*', unpack(fields))
  redis.call('ZREM', delayed, member)
end
return #due
