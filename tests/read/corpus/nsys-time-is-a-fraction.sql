CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, demangledName, globalPid);
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1.5, 2, 0, 7, 1, 1);
