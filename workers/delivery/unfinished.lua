-- unfinished: note why a consumer's begun jobs have no outcome, before they are given back.
--
-- KEYS  the queue's journal, then its streams
-- ARGV  group, consumer, then what is to be noted:
--       forgive  we ended it, not they: their starts are taken back; where a `stream entry-id` follows, the
--                start of that job alone
--       timeout  it ran the job of the `stream entry-id` that follows, alone, for longer than it may
-- out   number of records changed
--
-- Only of entries that the consumer still holds: who lost a claim may have run its job, and another decides
-- about it now. A record that is changed belongs to nobody afterwards: what is noted is not noted again.
-- First write: HDEL; a full server allows it, and then allows the HSET.
local journal, group, consumer, note, entry = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local records = redis.call('HGETALL', journal)
local streams, mine = {}, {}
for i = 2, #KEYS do streams[KEYS[i]] = true end

local function held(stream, id)
  return streams[stream] and #redis.call('XPENDING', stream, group, id, id, 1, consumer) > 0
end

for i = 1, #records, 2 do
  local stream, id, starts, holder = string.match(records[i + 1], '^(%S+) (%S+) (%d+) %S+ (.*)$')
  local its_entry = (stream or '') .. ' ' .. (id or '')
  local meant = its_entry == entry or (note == 'forgive' and entry == '')
  if holder == consumer and meant and held(stream, id) then
    mine[#mine + 1] = {job = records[i], entry = its_entry .. ' ', starts = tonumber(starts)}
  end
end

for _, record in ipairs(mine) do
  redis.call('HDEL', journal, record.job)
  local starts, why = record.starts, ' timeout '
  if note == 'forgive' then starts, why = starts - 1, ' - ' end
  if starts > 0 then redis.call('HSET', journal, record.job, record.entry .. starts .. why .. '-') end
end
return #mine
