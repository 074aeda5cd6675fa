-- take: lease instances that nobody holds.
--
-- KEYS  leases
-- ARGV  token of the worker, milliseconds that they last, milliseconds that one which ran out is remembered, until
--       when this call is meant (the server's clock, unix milliseconds); then for each lease whom it may also be
--       taken from: `over`, a holder whose time is over; `holder<tab>process`, these two, which are dead; or empty
-- out   for each lease 1 when it is ours now, else 0
--
-- A call that is read too late does nothing: it may have lain in the socket of a server that stood still, and then
-- every lease has run out, also those of workers that are about to renew them. The dead are named, for another may
-- have taken what was theirs, or another process have said that it is there, since somebody looked.
-- First write: DEL, of nothing; a full server allows it, and everything after it: a worker must be able to start
-- when Redis is full, for who else would empty it.
local token, ttl_ms, remembered_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('DEL', KEYS[1] .. ':none')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local late, taken = now > tonumber(ARGV[4]), {}
for i, key in ipairs(KEYS) do
  local lease = redis.call('GET', key)
  local until_ms, words = string.match(lease or '0 ', '^(%d+) (.*)$')
  local holder, process = string.match(words, '^([^\t]*)\t?(.*)$')
  local ours, may = holder == token, ARGV[i + 4]
  local from_other = (may == 'over' and tonumber(until_ms) < now) or (may ~= '' and may == words)
  if not late and (not lease or ours or from_other) then
    if not ours then process = '-' end
    local new = string.format('%.0f ', now + ttl_ms) .. token .. '\t' .. process
    redis.call('SET', key, new, 'PX', ttl_ms + remembered_ms)
    taken[i] = 1
  else
    taken[i] = 0
  end
end
return taken
