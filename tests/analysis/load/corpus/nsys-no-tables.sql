CREATE TABLE unrelated (x);
