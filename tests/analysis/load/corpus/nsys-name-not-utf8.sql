CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, demangledName, globalPid);
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, 7, 1, 1);
CREATE TABLE StringIds (id, value);
INSERT INTO StringIds VALUES (1, CAST(x'fffe' AS TEXT));
