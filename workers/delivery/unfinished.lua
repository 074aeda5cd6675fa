-- unfinished: note why a consumer's begun jobs have no outcome, before they are given back.
--
-- KEYS  the queue's journal
-- ARGV  consumer, then what is to be noted:
--       forgive  we ended it, not they: their starts are taken back
--       timeout  it ran for longer than it may: where it ran one job alone, that job is the reason
-- out   number of records changed
--
-- First write: HDEL; a full server allows it, and then allows the HSET.
local journal, consumer, note = KEYS[1], ARGV[1], ARGV[2]
local records = redis.call('HGETALL', journal)
local mine = {}
for i = 1, #records, 2 do
  local stream, id, starts, holder = string.match(records[i + 1], '^(%S+) (%S+) (%d+) %S+ (.*)$')
  if holder == consumer then
    mine[#mine + 1] = {job = records[i], entry = stream .. ' ' .. id .. ' ', starts = tonumber(starts)}
  end
end

if note == 'timeout' and #mine > 1 then return 0 end
for _, record in ipairs(mine) do
  redis.call('HDEL', journal, record.job)
  local starts, why = record.starts, ' timeout '
  if note == 'forgive' then starts, why = starts - 1, ' - ' end
  if starts > 0 then redis.call('HSET', journal, record.job, record.entry .. starts .. why .. consumer) end
end
return #mine
