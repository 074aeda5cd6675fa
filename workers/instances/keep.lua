-- keep: renew the lease of one instance, for the process that lives on it, and say which process that is.
--
-- KEYS  lease
-- ARGV  token of its worker, milliseconds that it lasts, milliseconds that it is remembered when it ran out, the
--       process (empty: it cannot say)
-- out   0 when another worker holds it, else 1
--
-- Where there is no lease nothing is written: its worker may just have given it back.
-- First write: DEL, of nothing; a full server allows it, and everything after it.
local ttl_ms = tonumber(ARGV[2])
redis.call('DEL', KEYS[1] .. ':none')
local lease = redis.call('GET', KEYS[1])
if not lease then return 1 end
if string.match(lease, '^%d+ ([^\t]*)') ~= ARGV[1] then return 0 end
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + ttl_ms
local renewed = string.format('%.0f ', until_ms) .. ARGV[1] .. '\t' .. ARGV[4]
redis.call('SET', KEYS[1], renewed, 'PX', ttl_ms + tonumber(ARGV[3]))
return 1
