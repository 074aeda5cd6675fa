-- requeue: put the entry of one dead letter back into the stream it came from, as if just sent.
--
-- KEYS  the queue's dead letters, its journal, the stream
-- ARGV  letter id, job id ('' when it has none), prefixes of the fence and cancelled keys, prefix of
--       the result keys ('' when results lie on another server), prefixes of the blob and kept blob
--       keys, life of a large array in seconds
-- out   requeued
--       gone       there is no such letter any more
--       alive      another living entry has its job id, and was started
--       answered   its job id has an answer
--       missing    a large array of it is gone
--
-- What outlived the job goes with the letter: its failure, or what stands for it, a cancel mark, its
-- starts. The letter goes last, so that an error in between leaves it.
-- First write: HDEL; a full server allows it, and then allows the XADD.
local dead, journal, stream = KEYS[1], KEYS[2], KEYS[3]
local id, job, fence, cancelled, result = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local blob, kept, blob_ttl_s = ARGV[6], ARGV[7], ARGV[8]

local letter = redis.call('XRANGE', dead, id, id)[1]
if not letter then return 'gone' end
if job ~= '' then
  local record = redis.call('HGET', journal, job)
  local its_stream, its_id = string.match(record or '', '^(%S+) (%S+) ')
  if its_stream and #redis.call('XRANGE', its_stream, its_id, its_id) > 0 then return 'alive' end
  local stored = result ~= '' and redis.call('GET', result .. job)
  if stored and answered(stored) then return 'answered' end
end

local entry, blobs, marks = {}, {}, {}
for i = 1, #letter[2], 2 do
  local original = string.match(letter[2][i], '^original:(.*)$')
  if original then
    entry[#entry + 1] = original
    entry[#entry + 1] = letter[2][i + 1]
    local where, names = string.match(original == 'blobs' and letter[2][i + 1] or '', '^%d+ ([a-z]+) ([%x ]+)$')
    for name in string.gmatch(names or '', '%x+') do
      if where == 'redis' then blobs[#blobs + 1] = blob .. name end
      marks[#marks + 1] = kept .. name
    end
  end
end
for _, key in ipairs(blobs) do
  if redis.call('EXISTS', key) == 0 then return 'missing' end
end
redis.call('HDEL', journal, job)
for _, key in ipairs(blobs) do redis.call('EXPIRE', key, blob_ttl_s) end
redis.call('XADD', stream, '*', unpack(entry))
if job ~= '' then
  redis.call('DEL', fence .. job, cancelled .. job)
  if result ~= '' then redis.call('DEL', result .. job) end
end
for _, key in ipairs(marks) do redis.call('DEL', key) end
redis.call('XDEL', dead, id)
return 'requeued'
