CREATE TABLE rocpd_metadata_g (tag, value);
CREATE VIEW rocpd_kernel_dispatch AS SELECT 1 AS start, 2 AS end, 1 AS kernel_id, 1 AS agent_id;
