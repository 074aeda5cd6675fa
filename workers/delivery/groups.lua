-- groups: create the consumer group of every stream that lacks it.
--
-- KEYS  streams
-- ARGV  group
-- out   number of groups created
--
-- First write: DEL; a full server allows it, and then allows XGROUP CREATE.
redis.call('DEL', KEYS[1] .. ':none')
local created = 0
for _, stream in ipairs(KEYS) do
  local there = false
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if not groups.err then
    for _, info in ipairs(groups) do
      for i = 1, #info, 2 do
        if info[i] == 'name' and info[i + 1] == ARGV[1] then there = true end
      end
    end
  end
  if not there then
    redis.call('XGROUP', 'CREATE', stream, ARGV[1], '0', 'MKSTREAM')
    created = created + 1
  end
end
return created
