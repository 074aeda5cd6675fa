-- hold: say that a worker is there, renew its leases, and tell who else is there and holds what.
--
-- KEYS  the host's hash of workers; then the lease of every instance that this worker may use
-- ARGV  token of the worker, milliseconds that it counts as there and its leases last without another call,
--       milliseconds that a lease which ran out is remembered, its node name, what others shall know of it (empty:
--       it leaves); then for each lease 1 where the worker believes that it holds it (else 0)
-- out   the server's clock in milliseconds, 1 when the worker was not known to be there (else 0), the words of all
--       workers of the host that are there, then for each lease its holder (empty: nobody), the process that lives
--       on its instance, and the milliseconds it lasts (below 0: it ran out)
--
-- A worker is there under its node's name: one that dies and is started again and again counts once.
--
-- A lease is a string, `until holder<tab>process`, with a server's time. It stays for a while when it has run out:
-- its holder may be alive and cut off, and others must be able to tell that from an instance that nobody used. Its
-- holder may renew it as long as nobody took it, also where the server lost it. The process is `-` until the first
-- one has said that it is there, which it does before it loads anything; it is empty where that is not known, as
-- after the server lost the lease.
-- First write: DEL, of nothing; a full server allows it, and everything after it.
local token, ttl_ms, remembered_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local node, words = ARGV[4], ARGV[5]
redis.call('DEL', KEYS[1] .. ':none')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local unknown = 0
if words == '' then
  redis.call('HDEL', KEYS[1], node)
else
  unknown = redis.call('HSET', KEYS[1], node, string.format('%.0f ', now + ttl_ms) .. words)
  redis.call('EXPIRE', KEYS[1], math.ceil(remembered_ms / 1000))
end
local present, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local until_ms, its_words = string.match(all[i + 1], '^(%d+) (.*)$')
  if not until_ms or tonumber(until_ms) < now then
    redis.call('HDEL', KEYS[1], all[i])
  else
    present[#present + 1] = its_words
  end
end

local leases = {}
for i = 2, #KEYS do
  local lease = redis.call('GET', KEYS[i])
  local until_ms, holder, process = string.match(lease or '0 ', '^(%d+) ([^\t]*)\t?(.*)$')
  if holder == token or (not lease and ARGV[i + 4] == '1') then
    until_ms, holder = now + ttl_ms, token
    local renewed = string.format('%.0f ', until_ms) .. token .. '\t' .. process
    redis.call('SET', KEYS[i], renewed, 'PX', ttl_ms + remembered_ms)
  end
  leases[#leases + 1] = holder
  leases[#leases + 1] = process
  leases[#leases + 1] = until_ms - now
end
return {now, unknown, present, leases}
