-- bridge: move messages that stock Celery apps put into the queue's lists into its streams.
--
-- KEYS  the queue's delayed set, its streams from the first claimed to the last, then its lists in
--       the order in which a stock worker would read them
-- ARGV  now (unix seconds), how many messages at most, after how many bytes to stop, the most bytes
--       that are read of a message beside its body, then the priority names in the order of the streams
-- out   {number of messages moved, 1 when more are left (else 0), the keys that hold no list ...}
--
-- A message goes on byte for byte in the field `raw`; only its headers and properties are looked at,
-- for the id, the rows, the priority and an eta in the future. One that cannot be read goes on as
-- well, without an id: whoever claims it makes a dead letter of it.
-- It is added before it is taken from its list, so that one that a stream refuses stays where it is.
-- First write: DEL, of nothing; a full server allows it, and then allows the XADD.
local now, at_most, enough_bytes, readable_bytes =
  tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local delayed, streams, first_list = KEYS[1], {}, #ARGV - 2
for i = 5, #ARGV do streams[ARGV[i]] = KEYS[i - 3] end

-- The JSON of a message without its body, where that comes first, as kombu writes it: a body may be
-- large, and is not for us.
local function envelope_of(raw)
  local _, open = string.find(raw, '^{"body": ?"')
  local close = open and string.find(raw, '"', open + 1, true)
  local escape = close and string.find(raw, '\\', open + 1, true)
  if not close or (escape and escape < close) then return raw end
  return '{"body":""' .. string.sub(raw, close + 1)
end

local function read(raw)
  local envelope = envelope_of(raw)
  if #envelope > readable_bytes then return {}, {}, false end
  local fine, message = pcall(cjson.decode, envelope)
  if not fine or type(message) ~= 'table' then return {}, {}, false end
  local headers, properties = message.headers, message.properties
  return type(headers) == 'table' and headers or {}, type(properties) == 'table' and properties or {}, true
end

-- Seconds since 1970 of an ISO 8601 time; nil for anything else. Without an offset it is UTC.
local function unix_s(text)
  if type(text) ~= 'string' then return nil end
  local date = '^(%d%d%d%d)%-(%d%d)%-(%d%d)[T ](%d%d):(%d%d)(.*)$'
  local year, month, day, hour, minute, rest = string.match(text, date)
  if not year then return nil end
  local second, zone = string.match(rest, '^:(%d%d%.?%d*)(.*)$')
  second, zone = tonumber(second or 0), zone or rest
  year, month, day = tonumber(year), tonumber(month), tonumber(day)
  if month < 1 or month > 12 or day < 1 or day > 31 then return nil end
  if tonumber(hour) > 23 or tonumber(minute) > 59 or second >= 60 then return nil end
  local ahead_s = 0
  if zone ~= '' and zone ~= 'Z' then
    local sign, hours, minutes = string.match(zone, '^([+-])(%d%d):?(%d%d)$')
    if not sign then return nil end
    ahead_s = (hours * 60 + minutes) * (sign == '+' and 60 or -60)
  end
  -- Days since 1 March of the year 0: February, and with it the leap day, comes last.
  if month <= 2 then year, month = year - 1, month + 12 end
  local days = 365 * year + math.floor(year / 4) - math.floor(year / 100) + math.floor(year / 400)
    + math.floor((153 * (month - 3) + 2) / 5) + day - 1
  return (days - 719468) * 86400 + hour * 3600 + minute * 60 + second - ahead_s
end

-- As `priority_of` in producer/transport.py; of a message that cannot be read the list says it.
local function priority_of(headers, properties, readable, in_first_list)
  if type(headers.fleet_priority) == 'string' and streams[headers.fleet_priority] then
    return headers.fleet_priority
  end
  local number = properties.priority
  local low = type(number) == 'number' and number > 0
  return (low or not (readable or in_first_list)) and 'low' or 'normal'
end

local function rows_of(headers)
  local rows = headers.fleet_rows
  if type(rows) == 'number' and rows >= 1 and rows < 2 ^ 31 then return string.format('%d', rows) end
  return '1'
end

local function put(raw, in_first_list)
  local headers, properties, readable = read(raw)
  local id = type(headers.id) == 'string' and headers.id ~= '' and headers.id or nil
  local rows, priority = rows_of(headers), priority_of(headers, properties, readable, in_first_list)
  local due_s = id and unix_s(headers.eta)
  if due_s and due_s > now then
    local packed = cmsgpack.pack({id = id, rows = rows, raw = raw, priority = priority})
    redis.call('ZADD', delayed, string.format('%.6f', due_s), packed)
  elseif id then
    redis.call('XADD', streams[priority], '*', 'id', id, 'rows', rows, 'raw', raw)
  else
    redis.call('XADD', streams[priority], '*', 'rows', rows, 'raw', raw)
  end
end

redis.call('DEL', delayed .. ':none')
local moved, bytes, out = 0, 0, {0, 0}
for i = first_list, #KEYS do
  local kind = redis.call('TYPE', KEYS[i]).ok
  if kind ~= 'list' and kind ~= 'none' then out[#out + 1] = KEYS[i] end
  for _ = 1, kind == 'list' and redis.call('LLEN', KEYS[i]) or 0 do
    if moved >= at_most or bytes >= enough_bytes then
      out[2] = 1
      break
    end
    local raw = redis.call('LINDEX', KEYS[i], -1)
    put(raw, i == first_list)
    redis.call('RPOP', KEYS[i])
    moved, bytes = moved + 1, bytes + #raw
  end
end
out[1] = moved
return out
