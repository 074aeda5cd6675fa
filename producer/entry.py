"""Where the `fleet` command begins, before anything heavy is imported: a worker that is told to end
while it starts must end in good order.
"""

import signal
import sys


def main() -> None:
    """Run the command; the entry point of the package."""
    if sys.argv[1:2] == ["worker"]:
        # Kept until the worker can obey: importing what it is made of takes half a second and more.
        # As process 1 of a container it would even be thrown away while nobody handles it, and a
        # stop would last until the supervisor kills.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])

    try:
        from producer.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
