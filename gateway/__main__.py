"""Where a process begins (``gateway``, ``nvidia-device-plugin``, ``python -m gateway``): before all that takes time to import.

A SIGHUP that comes before the daemon listens would end it. A command gets back what it was started with.
"""

import signal


def main() -> None:
    """Run the command line (the ``gateway`` entry point)."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gateway.cli.main import gateway

    gateway(obj=hangup)


def nvidia() -> None:
    """Run the daemon under the name, and with the defaults, of NVIDIA's (the ``nvidia-device-plugin`` entry point)."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gateway.cli.argv import first_word
    from gateway.cli.run import NVIDIA, run

    first_word(NVIDIA)
    run(prog_name=NVIDIA)


if __name__ == "__main__":
    main()
