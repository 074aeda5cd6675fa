-- begin: decide for each job of a batch whether it may start now, and count the start.
--
-- KEYS  the queue's journal, then its streams
-- ARGV  group, consumer, max attempts, prefixes of the result, fence, cancelled, blob and kept
--       blob keys, then per job: number of its stream (from 2, as in KEYS), entry id, job id, packed keys of the
--       marks that cancel it beside its own ('' for none), its field `blobs` ('' for none)
-- out   per job {verdict, starts before this one}
--       run        start it now, with the others
--       alone      start it now and nothing beside it: an earlier start has no outcome
--       later      give it back, uncounted: it must run alone, or another of the batch must
--       lost       no longer ours
--       done       has its result already; dropped here
--       duplicate  another living entry has this job id; dropped here
--       again      as duplicate, and the same large arrays: a send that was repeated over a new connection
--       cancelled  its client does not want it; still claimed, to be ended by `complete`
--       timeout    it ran alone for longer than it may; still claimed, to be ended by `bury`
--       exhausted  started as often as allowed; still claimed, to be ended by `bury`
--
-- First write: XCLAIM or XACK; a full server allows both, and then allows the HSET.
local group, consumer, max_attempts = ARGV[1], ARGV[2], tonumber(ARGV[3])
local result, fence, cancelled, blob, kept = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local journal = KEYS[1]
local out, seen, running, alone = {}, {}, 0, false

local function blobs_of(fields)
  for i = 1, #fields, 2 do
    if fields[i] == 'blobs' then return fields[i + 1] end
  end
  return ''
end

-- A copy that was sent over a connection which broke has the same large arrays as the job that lives, or as the
-- dead letter that it became.
local function drop(stream, id, blobs, living)
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
  if blobs ~= '' and blobs == living then return 'again' end
  for name in string.gmatch(string.match(blobs, '^%d+ redis ([%x ]+)$') or '', '%x+') do
    if redis.call('EXISTS', kept .. name) == 0 then redis.call('DEL', blob .. name) end
  end
  return 'duplicate'
end

local function is_cancelled(job, marks)
  if redis.call('EXISTS', cancelled .. job) == 1 then return true end
  return marks ~= '' and redis.call('EXISTS', unpack(cmsgpack.unpack(marks))) > 0
end

local function verdict_of(stream, id, job, marks, blobs)
  if #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 0 then return 'lost', 0 end
  redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
  local record = redis.call('HGET', journal, job)
  local starts, why = 0, '-'
  if record then
    local its_stream, its_id, count, reason = string.match(record, '^(%S+) (%S+) (%d+) (%S+) ')
    if its_stream == stream and its_id == id then
      starts, why = tonumber(count), reason
    elseif its_stream then
      local living = redis.call('XRANGE', its_stream, its_id, its_id)[1]
      if living then
        return drop(stream, id, blobs, blobs_of(living[2])), 0
      end
    end
  end
  if seen[job] then
    return drop(stream, id, blobs, seen[job]), 0
  end
  seen[job] = blobs
  if redis.call('EXISTS', result .. job, fence .. job) > 0 then
    redis.call('HDEL', journal, job)
    drop(stream, id, blobs)
    return 'done', starts
  end
  if is_cancelled(job, marks) then return 'cancelled', starts end
  if why == 'timeout' then return 'timeout', starts end
  if starts >= max_attempts then return 'exhausted', starts end
  if alone or (starts > 0 and running > 0) then return 'later', starts end
  redis.call('HSET', journal, job, stream .. ' ' .. id .. ' ' .. (starts + 1) .. ' - ' .. consumer)
  running = running + 1
  if starts > 0 then
    alone = true
    return 'alone', starts
  end
  return 'run', starts
end

for i = 9, #ARGV, 5 do
  local stream = KEYS[tonumber(ARGV[i])]
  local verdict, starts = verdict_of(stream, ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
  out[#out + 1] = {verdict, starts}
end
return out
