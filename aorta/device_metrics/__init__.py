"""Device metrics: temperature, power, clocks, utilisation, memory and throttling of a rank's device."""
