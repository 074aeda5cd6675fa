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
  local made = redis.pcall('XGROUP', 'CREATE', stream, ARGV[1], '0', 'MKSTREAM')
  if not made.err then
    created = created + 1
  elseif not string.find(made.err, 'BUSYGROUP', 1, true) then
    return made
  end
end
return created
