-- file_begin: has a content deleted later, unless its file is recorded by then.
-- KEYS  1 tag
-- ARGV  1 file id  2 ms until the content is due for deletion
-- reply {'OK'}
local function file_begin(keys, argv)
  redis.call('ZADD', keys[1] .. ':objects_due', 'NX', now_ms() + tonumber(argv[2]), argv[1])
  return {'OK'}
end

redis.register_function('batchway_v1_file_begin', file_begin)
