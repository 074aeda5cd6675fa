-- complete: end jobs and store their results, all or nothing for each job.
--
-- KEYS  the queue's journal, then its streams
-- ARGV  group, consumer, life of a result in seconds, 1 where results lie on another server (else 0), prefixes
--       of the result, fence, cancelled, blob and kept blob keys, then per job: number of its stream (from 2, as
--       in KEYS), entry id, job id, packed result ('' when it is stored already), channel that is told the id
--       ('' for none), its field `blobs` ('' for none)
-- out   per job: stored | kept (a terminal result was there before) | lost (no longer ours: no result is stored)
--
-- Where the result lies on another server, a fence stands for it here as long as it lives there, so that a
-- copy of the job that comes later is known to be answered.
--
-- First write: DEL or HDEL; a full server allows both, and then allows the SET. What is refused for another
-- reason, such as a right that the user lacks, ends the script before the job is acknowledged: it keeps its
-- answer.
local group, consumer, ttl_s, apart = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local result, fence, cancelled, blob, kept = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local journal = KEYS[1]
local out, told = {}, {}

-- A record whose entry somebody deleted belongs to no holder that would end it.
local function forget(stream, id, job)
  local entry = stream .. ' ' .. id .. ' '
  local record = redis.call('HGET', journal, job)
  if record and string.sub(record, 1, #entry) == entry and #redis.call('XRANGE', stream, id, id) == 0 then
    redis.call('HDEL', journal, job)
  end
  return 'lost'
end

local function store(job, payload)
  if payload == '' then return 'stored' end
  if redis.call('EXISTS', fence .. job) == 1 then return 'kept' end
  if not redis.call('SET', result .. job, payload, 'EX', ttl_s, 'NX') then return 'kept' end
  redis.call('PUBLISH', result .. job, payload)
  return 'stored'
end

local function complete(stream, id, job, payload, blobs)
  if #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 0 then return forget(stream, id, job) end
  redis.call('DEL', cancelled .. job)
  local done = store(job, payload)
  if apart then redis.call('SET', fence .. job, 1, 'EX', ttl_s, 'NX') end
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
  redis.call('HDEL', journal, job)
  for name in string.gmatch(string.match(blobs, '^%d+ redis ([%x ]+)$') or '', '%x+') do
    -- What a dead letter needs was sent twice.
    if redis.call('EXISTS', kept .. name) == 0 then redis.call('DEL', blob .. name) end
  end
  return done
end

for i = 10, #ARGV, 6 do
  local job, channel = ARGV[i + 2], ARGV[i + 4]
  local done = complete(KEYS[tonumber(ARGV[i])], ARGV[i + 1], job, ARGV[i + 3], ARGV[i + 5])
  out[#out + 1] = done
  if channel ~= '' and done ~= 'lost' then
    told[channel] = told[channel] and (told[channel] .. ',' .. job) or job
  end
end
for channel, jobs in pairs(told) do redis.call('PUBLISH', channel, jobs) end
return out
