-- claim: take the next batch of one queue: of those with work of the highest priority, the one that waited longest.
--
-- KEYS  per queue: its streams from the first claimed to the last, then its journal
-- ARGV  group, consumer, free, streams per queue, 1 while a batch runs in the claiming process (else 0),
--       claims that may end with their process before the job was begun, then per queue:
--       max rows, max bytes, max entries, milliseconds since the claiming process ended its last batch of it
-- out   {} when nothing waits, else {queue number from 0, why closed, {{stream key, entry id, fields, reads}, ...}}
--       why closed: full | bytes | empty | alone
--       reads: claims that the job outlived without being begun, this one included
--
-- A queue has waited since its oldest entry was added, or since its last batch, whichever is later: a flood that
-- is older than everything else has its turn like the others. Of equals the one comes first whose last turn was
-- longer ago, then the one with the older entry.
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
  local large = string.match(field(fields, 'blobs') or '', '^%d+')
  local its_bytes = #(field(fields, 'body') or field(fields, 'raw') or '') + tonumber(large or 0)
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

local queues, skipped = #KEYS / (per_queue + 1), {}
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function key_of(queue, i) return KEYS[queue * (per_queue + 1) + i] end

local function last_read(stream)
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local about = {}
    for i = 1, #info, 2 do about[info[i]] = info[i + 1] end
    if about.name == group then return about['last-delivered-id'] end
  end
end

-- The id of the oldest entry that waits, as two numbers; nothing where none does. What was given back was read
-- before everything that was not.
local function oldest(stream)
  if redis.call('XLEN', stream) == 0 then return end
  local given_back = redis.call('XPENDING', stream, group, '-', '+', 1, free)[1]
  local id = given_back and given_back[1]
  if not id then
    local read = last_read(stream)
    local entry = read and redis.call('XRANGE', stream, '(' .. read, '+', 'COUNT', 1)[1]
    id = entry and entry[1]
  end
  if id then
    local ms, number = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(ms), tonumber(number)
  end
end

local function is_before(a, b)
  for _, by in ipairs({'waited_ms', 'since_turn_ms', 'age_ms'}) do
    if a[by] ~= b[by] then return a[by] > b[by] end
  end
  return a.number < b.number
end

-- Whoever had its turn more lately than the best so far has waited is not looked at: its entry would be read for
-- nothing.
local function longest_waiting(i)
  local best
  for queue = 0, queues - 1 do
    local since_ms = tonumber(ARGV[10 + 4 * queue])
    if not skipped[queue] and (not best or since_ms >= best.waited_ms) then
      local ms, number = oldest(key_of(queue, i))
      if ms then
        local age_ms = now_ms - ms
        local its = {waited_ms = math.min(age_ms, since_ms), since_turn_ms = since_ms, age_ms = age_ms, number = number}
        if not best or is_before(its, best) then
          best = its
          best.queue = queue
        end
      end
    end
  end
  return best and best.queue
end

local function next_queue()
  if queues == 1 then return not skipped[0] and 0 or nil end
  for i = 1, per_queue do
    local queue = longest_waiting(i)
    if queue then return queue end
  end
end

local function take_batch(queue)
  local limits = {
    rows = tonumber(ARGV[7 + 4 * queue]),
    bytes = tonumber(ARGV[8 + 4 * queue]),
    entries = tonumber(ARGV[9 + 4 * queue]),
  }
  local journal = key_of(queue, per_queue + 1)
  for i = 1, per_queue do
    if why then break end
    take_given_back(key_of(queue, i), journal, limits)
    take_new(key_of(queue, i), journal, limits)
  end
end

while true do
  local queue = next_queue()
  if not queue then return {} end
  take_batch(queue)
  if #taken > 0 then return {queue, why or 'empty', taken} end
  -- What waits there may not be read now, or was deleted; the others have their turn.
  skipped[queue], why = true, nil
end
