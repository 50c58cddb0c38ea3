CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, deviceId, streamId, "end" AS (start + 1));
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, deviceId, streamId) VALUES (1, 0, 7);
