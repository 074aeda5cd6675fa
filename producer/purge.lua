-- purge: delete what waits in a queue, large arrays in Redis too, and leave what is claimed.
--
-- KEYS  the queue's delayed set, its journal, then its streams
-- ARGV  group, consumer of what was given back, how many at most, prefixes of the blob and kept blob keys
-- out   how many were taken, how many of these were there, then the field `blobs` of those with files
--
-- Each is read when its turn comes: a hundred may be more than fits in memory.
-- All writes are deletions, which a full server allows.
local group, free, left, blob, kept = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local taken, deleted, files = 0, 0, {}

-- A copy of a job that became a dead letter has the letter's arrays.
local function forget(blobs)
  local where, names = string.match(blobs, '^%d+ (%l+) ([%x ]+)$')
  for name in string.gmatch(names or '', '%x+') do
    if redis.call('EXISTS', kept .. name) == 1 then return end
    if where == 'redis' then redis.call('DEL', blob .. name) end
  end
  if where == 'store' then files[#files + 1] = blobs end
end

local function count(was_there)
  taken, left, deleted = taken + 1, left - 1, deleted + was_there
end

local function purge_delayed(delayed)
  while left > 0 do
    local member = redis.call('ZRANGE', delayed, 0, 0)[1]
    if not member then return end
    local readable, fields = pcall(cmsgpack.unpack, member)
    count(redis.call('ZREM', delayed, member))
    if readable and type(fields) == 'table' and type(fields.blobs) == 'string' then forget(fields.blobs) end
  end
end

local function delete(stream, id, fields)
  count(redis.call('XDEL', stream, id))
  local of = {}
  for i = 1, #fields, 2 do of[fields[i]] = fields[i + 1] end
  if of['blobs'] then forget(of['blobs']) end
  return of['id']
end

-- What was started and given back has a record, which nobody else would delete.
local function strike(stream, id, job)
  local record = job and redis.call('HGET', KEYS[2], job)
  local prefix = stream .. ' ' .. id .. ' '
  if record and string.sub(record, 1, #prefix) == prefix then redis.call('HDEL', KEYS[2], job) end
end

-- The id behind which nobody has claimed anything; nil where nobody has in all of the stream.
local function last_claimed(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return nil end
  for _, told in ipairs(groups) do
    local of = {}
    for i = 1, #told, 2 do of[told[i]] = told[i + 1] end
    if of['name'] == group then return of['last-delivered-id'] end
  end
end

local function purge_stream(stream)
  local last = last_claimed(stream)
  if last and left > 0 then
    for _, given_back in ipairs(redis.call('XPENDING', stream, group, '-', '+', left, free)) do
      local id = given_back[1]
      local entry = redis.call('XRANGE', stream, id, id)[1]
      redis.call('XACK', stream, group, id)
      strike(stream, id, delete(stream, id, entry and entry[2] or {}))
    end
  end
  while left > 0 do
    local entry = redis.call('XRANGE', stream, last and '(' .. last or '-', '+', 'COUNT', 1)[1]
    if not entry then return end
    delete(stream, entry[1], entry[2])
  end
end

purge_delayed(KEYS[1])
for i = 3, #KEYS do purge_stream(KEYS[i]) end
return {taken, deleted, unpack(files)}
