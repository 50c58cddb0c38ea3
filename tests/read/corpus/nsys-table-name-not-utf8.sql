PRAGMA writable_schema = ON;
CREATE TABLE a (x);
UPDATE sqlite_master SET name = CAST(x'ff' AS TEXT), tbl_name = CAST(x'ff' AS TEXT), sql = CAST(x'ff' AS TEXT);
