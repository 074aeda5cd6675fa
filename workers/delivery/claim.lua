-- claim: take the next batch of one queue, the first in the given order that has work.
--
-- KEYS  per queue: its streams from the first claimed to the last, then its journal
-- ARGV  group, consumer, free, streams per queue, 1 while a batch runs in the claiming process (else 0),
--       claims that may end with their process before the job was begun, then per queue:
--       max rows, max bytes, max entries
-- out   {} when nothing waits, else {queue number from 0, why closed, {{stream key, entry id, fields, reads}, ...}}
--       why closed: full | bytes | empty | alone
--       reads: claims that the job outlived without being begun, this one included
--
-- Given-back entries (held by the consumer `free`) come before new ones. An entry whose job was started
-- before and has no outcome ends the batch, or is the whole of it. So does one whose readers died more often
-- than chance explains, and it is not taken while a batch runs: to read it may be what killed them.
-- An entry that does not fit is given back.
-- First writes: XCLAIM, XREADGROUP; a full server allows both.
local group, consumer, free, per_queue = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local running, free_reads = ARGV[5] == '1', tonumber(ARGV[6])
local rows, bytes, taken, why = 0, 0, {}, nil

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
end

-- Redis counts claims; the one that is given back unread does not count.
local function give_back(stream, id, reads)
  redis.call('XCLAIM', stream, group, free, 0, id, 'RETRYCOUNT', reads - 1, 'JUSTID')
end

-- Take one entry, or give it back and say why the batch is closed.
local function take(stream, journal, entry, reads, limits)
  local id, fields = entry[1], entry[2]
  local its_rows = math.max(1, tonumber(field(fields, 'rows') or '1') or 1)
  local its_bytes = #(field(fields, 'body') or field(fields, 'raw') or '')
  local job = field(fields, 'id')
  local started = job and redis.call('HEXISTS', journal, job) == 1
  local unreadable = not started and reads > free_reads
  local suspect = started or unreadable
  if unreadable and running then
    why = 'empty'
    return give_back(stream, id, reads)
  end
  if #taken > 0 then
    if suspect then why = 'empty'
    elseif rows + its_rows > limits.rows then why = 'full'
    elseif bytes + its_bytes > limits.bytes then why = 'bytes' end
    if why then return give_back(stream, id, reads) end
  end
  taken[#taken + 1] = {stream, id, fields, started and 0 or reads}
  rows, bytes = rows + its_rows, bytes + its_bytes
  if suspect then why = 'alone'
  elseif rows >= limits.rows or #taken >= limits.entries then why = 'full'
  elseif bytes >= limits.bytes then why = 'bytes' end
end

local function take_given_back(stream, journal, limits)
  while not why do
    local waiting = redis.call('XPENDING', stream, group, '-', '+', 16, free)
    if #waiting == 0 then return end
    for _, pending in ipairs(waiting) do
      local claimed = redis.call('XCLAIM', stream, group, consumer, 0, pending[1])
      -- An entry that was deleted while it was held: nothing to run, and XACK ends the claim on every server.
      if not claimed[1] or not claimed[1][2] then
        redis.call('XACK', stream, group, pending[1])
      else
        take(stream, journal, claimed[1], pending[4] + 1, limits)
        if why then return end
      end
    end
  end
end

local function take_new(stream, journal, limits)
  while not why do
    local read = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
    if not read then return end
    take(stream, journal, read[1][2][1], 1, limits)
  end
end

local queues = #KEYS / (per_queue + 1)
for queue = 0, queues - 1 do
  local limits = {
    rows = tonumber(ARGV[7 + 3 * queue]),
    bytes = tonumber(ARGV[8 + 3 * queue]),
    entries = tonumber(ARGV[9 + 3 * queue]),
  }
  local first = queue * (per_queue + 1)
  local journal = KEYS[first + per_queue + 1]
  for i = 1, per_queue do
    if why then break end
    take_given_back(KEYS[first + i], journal, limits)
    take_new(KEYS[first + i], journal, limits)
  end
  if #taken > 0 then return {queue, why or 'empty', taken} end
end
return {}
