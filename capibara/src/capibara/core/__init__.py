"""See `capibara.core.kernels`. Véase `capibara.core.kernels`."""
