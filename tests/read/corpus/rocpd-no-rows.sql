CREATE TABLE rocpd_metadata_g (tag, value);
CREATE TABLE rocpd_kernel_dispatch_g (start, end, kernel_id, agent_id, pid);
