CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INT, end INT, deviceId INT, streamId INT, globalPid INT, contextId INT, correlationId INT,
    demangledName INT, shortName INT, mangledName INT, gridX INT
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INT, end INT, deviceId INT, streamId INT, globalPid INT, bytes INT, copyKind INT, correlationId INT
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INT, end INT, globalTid INT, correlationId INT, eventClass INT, nameId INT
);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT, utcTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER PRIMARY KEY, name TEXT, label TEXT);
CREATE VIEW endless AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n) SELECT x FROM n;
INSERT INTO StringIds VALUES
    (1, 'void cutlass::Kernel2<gemm>(Params)'),
    (2, 'ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)'),
    (3, 'Kernel2'), (4, 'ncclDevKernel_AllReduce'), (9, 'step=4');
INSERT INTO TARGET_INFO_SESSION_START_TIME (utcEpochNs) VALUES (1790000000000000000);
INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'dgx1');
INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'HTOD', 'Host-to-Device');

-- Of each process:

INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES
    ($later + 1100, $later + 1500, $device, 7, $process, 1, 11, 1, 3, NULL, 1),
    ($later + 1400, $later + 1800, $device, 20, $process, 1, 12, 2, 4, NULL, 1),
    ($later + 2100, $later + 2300, $device, 7, $process, 1, 13, 1, 3, NULL, 1);
INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId) VALUES
    ($later + 1050, $later + 1055, $process + 77, 11),
    ($later + 1300, $later + 1305, $process + 77, 12),
    ($later + 1950, $later + 1955, $process + 77, 13);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, globalPid, bytes, copyKind) VALUES
    ($later + 1850, $later + 1900, $device, 7, $process, 4096, 1);
INSERT INTO NVTX_EVENTS VALUES
    ($later + 1000, $later + 2000, 59, 'step=3', NULL, $process + 70),
    ($later + 2000, $later + 3000, 59, NULL, 9, $process + 70),
    ($later + 1500, NULL, 34, 'step=99', NULL, $process + 70),
    ($later + 1000, $later + 1500, 59, 'forward', NULL, $process + 70),
    ($later + 3000, NULL, 59, 'step=5', NULL, $process + 70);
