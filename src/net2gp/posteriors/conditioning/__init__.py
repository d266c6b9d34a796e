"""From a problem (kernel, data, likelihood) to the process given the data."""
