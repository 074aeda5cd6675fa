-- queues: count what some queues hold, at one moment.
--
-- KEYS  per queue: its streams from the first claimed to the last, its delayed set, its dead letters
-- ARGV  group, consumer of what was given back, streams per queue, 1 to look for the oldest too (else 0)
-- out   per queue {entries that wait, entries that instances hold, delayed, dead,
--       milliseconds since the oldest that waits was added, by the server's clock (-1 for none)}
--
-- Waiting is the length of a stream less what instances hold; what was given back waits again. The
-- cost is the same for ten entries and for a million: no list is walked but that of the consumers.
local group, free, per_queue, oldest = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- The last entry that our group has read; nothing for a stream that nobody ever served.
local function last_read(stream)
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local about = {}
    for i = 1, #info, 2 do about[info[i]] = info[i + 1] end
    if about.name == group then return about['last-delivered-id'] end
  end
end

local function held(stream)
  local sum = 0
  for _, consumer in ipairs(redis.call('XPENDING', stream, group)[4] or {}) do
    if consumer[1] ~= free then sum = sum + tonumber(consumer[2]) end
  end
  return sum
end

local function age_ms(entry)
  return entry and math.max(0, now_ms - tonumber(string.match(entry[1], '^%d+'))) or -1
end

local function count(stream)
  if redis.call('EXISTS', stream) == 0 then return 0, 0, -1 end
  local length, read = redis.call('XLEN', stream), last_read(stream)
  local claimed = read and math.min(length, held(stream)) or 0
  local age = -1
  if oldest then
    age = age_ms(redis.call('XRANGE', stream, read and '(' .. read or '-', '+', 'COUNT', 1)[1])
    if read then
      age = math.max(age, age_ms(redis.call('XPENDING', stream, group, '-', '+', 1, free)[1]))
    end
  end
  return length - claimed, claimed, age
end

local out = {}
for first = 1, #KEYS, per_queue + 2 do
  local waiting, claimed, age = 0, 0, -1
  for i = first, first + per_queue - 1 do
    local its_waiting, its_claimed, its_age = count(KEYS[i])
    waiting, claimed, age = waiting + its_waiting, claimed + its_claimed, math.max(age, its_age)
  end
  local delayed = redis.call('ZCARD', KEYS[first + per_queue])
  out[#out + 1] = {waiting, claimed, delayed, redis.call('XLEN', KEYS[first + per_queue + 1]), age}
end
return out
