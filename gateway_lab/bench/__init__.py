"""The promises that have a figure, measured: ``make bench``. ``__main__`` says how, the other modules one thing each."""
