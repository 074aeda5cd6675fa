-- answered: whether a stored result is an answer, for the scripts that begin with this.
--
-- An error is stored as JSON, whatever an answer is packed as.
local function answered(stored)
  local readable, meta = pcall(cjson.decode, stored)
  return not readable or type(meta) ~= 'table' or meta.status == 'SUCCESS'
end

