"""Expert parallelism: tokens travel between the devices of experts, and experts' weights are placed on devices."""
