CREATE TABLE rocpd_metadata_g (tag, value);
CREATE TABLE rocpd_kernel_dispatch_g (start, end, kernel_id, agent_id, pid);
INSERT INTO rocpd_kernel_dispatch_g VALUES (1, 2, 1, 1, 1);
CREATE TABLE rocpd_event_g (category_id);
