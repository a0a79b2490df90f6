"""Measuring which config is best: ``fusedops tune``, and ``FUSEDOPS_TUNE=1``. Nothing else imports this."""
