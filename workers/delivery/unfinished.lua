-- unfinished: note why a consumer's begun jobs have no outcome, before they are given back.
--
-- KEYS  the queue's journal
-- ARGV  consumer, then what is to be noted:
--       forgive  we ended it, not they: their starts are taken back
--       timeout  it ran the job of the `stream entry-id` that follows, alone, for longer than it may
-- out   number of records changed
--
-- A record that is changed belongs to nobody afterwards: what is noted once is not noted again.
-- First write: HDEL; a full server allows it, and then allows the HSET.
local journal, consumer, note, entry = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local records = redis.call('HGETALL', journal)
local mine = {}
for i = 1, #records, 2 do
  local stream, id, starts, holder = string.match(records[i + 1], '^(%S+) (%S+) (%d+) %S+ (.*)$')
  local its_entry = (stream or '') .. ' ' .. (id or '')
  if holder == consumer and (note == 'forgive' or its_entry == entry) then
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
