CREATE TABLE rocpd_metadata_g (tag, value);
CREATE TABLE rocpd_kernel_dispatch_g (start, end, kernel_id, agent_id, pid);
INSERT INTO rocpd_metadata_g VALUES ('schema_version', '4.1.0');
