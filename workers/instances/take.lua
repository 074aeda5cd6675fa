-- take: lease instances that nobody holds.
--
-- KEYS  leases
-- ARGV  token of the worker, milliseconds that they last, milliseconds that one which ran out is remembered, until
--       when this call is meant (the server's clock, unix milliseconds); then for each lease 1 where it may also be
--       taken from a holder whose time is over (else 0)
-- out   for each lease 1 when it is ours now, else 0
--
-- A call that is read too late does nothing: it may have lain in the socket of a server that stood still, and then
-- every lease has run out, also those of workers that are about to renew them.
-- First write: DEL, of nothing; a full server allows it, and everything after it: a worker must be able to start
-- when Redis is full, for who else would empty it.
local token, ttl_ms, remembered_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('DEL', KEYS[1] .. ':none')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local late, taken = now > tonumber(ARGV[4]), {}
for i, key in ipairs(KEYS) do
  local lease = redis.call('GET', key)
  local until_ms, holder = string.match(lease or '0 ', '^(%d+) (.*)$')
  local over = tonumber(until_ms) < now and ARGV[i + 4] == '1'
  if not late and (not lease or holder == token or over) then
    redis.call('SET', key, string.format('%.0f ', now + ttl_ms) .. token, 'PX', ttl_ms + remembered_ms)
    taken[i] = 1
  else
    taken[i] = 0
  end
end
return taken
