CREATE TABLE rocpd_metadata_g (tag, value);
