-- bury: end one job as a dead letter, with its reason and the original entry, and store its failure.
--
-- KEYS  the queue's journal, its dead letters, the entry's stream
-- ARGV  group, consumer, entry id, job id ('' when it has none that can be read), prefixes of the result,
--       fence and cancelled keys, life of a result in seconds, 1 where results lie on another server (else 0),
--       packed failure ('' for none), channel that is told the id ('' for none), prefixes of the blob and
--       kept blob keys, life of a large array in seconds, then field, value, ... of the letter (code, reason,
--       attempts, worker, buried_unix_s)
-- out   1, or 0 when the entry is no longer ours
--
-- First write: XCLAIM; a full server allows it, and then allows the XADD.
local group, consumer, id, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local result, fence, cancelled, ttl_s, apart = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9] == '1'
local payload, channel, blob, kept, blob_ttl_s = ARGV[10], ARGV[11], ARGV[12], ARGV[13], ARGV[14]
local journal, dead, stream = KEYS[1], KEYS[2], KEYS[3]

if #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 0 then return 0 end
redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
local letter = {}
for i = 15, #ARGV do letter[#letter + 1] = ARGV[i] end
letter[#letter + 1] = 'stream'
letter[#letter + 1] = stream
letter[#letter + 1] = 'entry'
letter[#letter + 1] = id
local entry = redis.call('XRANGE', stream, id, id)[1]
if entry then
  -- Lua passes on some thousands of values; an entry of ours has fewer than ten.
  for i = 1, math.min(#entry[2], 1000), 2 do
    letter[#letter + 1] = 'original:' .. entry[2][i]
    letter[#letter + 1] = entry[2][i + 1]
    local large = entry[2][i] == 'blobs' and string.match(entry[2][i + 1], '^%d+ [a-z]+ ([%x ]+)$') or ''
    for name in string.gmatch(large, '%x+') do
      redis.call('EXPIRE', blob .. name, blob_ttl_s)
      redis.call('SET', kept .. name, 1, 'EX', blob_ttl_s)
    end
  end
end
redis.call('XADD', dead, '*', unpack(letter))
redis.call('XACK', stream, group, id)
redis.call('XDEL', stream, id)
if job ~= '' then
  redis.call('HDEL', journal, job)
  redis.call('DEL', cancelled .. job)
  if apart then redis.call('SET', fence .. job, 1, 'EX', ttl_s, 'NX') end
  if payload ~= '' and redis.call('EXISTS', fence .. job) == 0
      and redis.call('SET', result .. job, payload, 'EX', ttl_s, 'NX') then
    redis.call('PUBLISH', result .. job, payload)
  end
  if channel ~= '' then redis.call('PUBLISH', channel, job) end
end
return 1
