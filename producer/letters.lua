-- letters: tell of dead letters of one queue all but what their entries hold.
--
-- KEYS  the queue's dead letters
-- ARGV  ids to begin and to end at, how many at most
-- out   per letter {letter id, {field, value, ...}, envelope of its entry ('' for none),
--       {field of its entry, size, ...}}; the entry's field `blobs` is among the fields
--
-- One by one: large bodies, a hundred at a time, would be more than a script should hold.
local from, out = ARGV[1], {}

-- A message that came through a list, without its body where that comes first, as kombu writes it.
local function without_body(raw)
  local _, open = string.find(raw, '^{"body": ?"')
  local close = open and string.find(raw, '"', open + 1, true)
  return close and '{"body":""' .. string.sub(raw, close + 1) or ''
end

for _ = 1, tonumber(ARGV[3]) do
  local letter = redis.call('XRANGE', KEYS[1], from, ARGV[2], 'COUNT', 1)[1]
  if not letter then break end
  local fields, about, envelope, sizes = letter[2], {}, '', {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    local original = string.match(name, '^original:(.*)$')
    if original then
      sizes[#sizes + 1] = original
      sizes[#sizes + 1] = #value
      if original == 'env' then envelope = value end
      if original == 'raw' then envelope = without_body(value) end
      if original == 'blobs' then
        about[#about + 1] = original
        about[#about + 1] = value
      end
    else
      about[#about + 1] = name
      about[#about + 1] = value
    end
  end
  out[#out + 1] = {letter[1], about, envelope, sizes}
  from = '(' .. letter[1]
end
return out
