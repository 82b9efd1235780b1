"""Eight threads of Python that call at once."""

import threading

THREADS = 8


def in_threads(work) -> None:
    """Runs work(thread number) in all threads, which start together; raises the error of the first that fails."""
    ready, failures = threading.Barrier(THREADS), []

    def one(number):
        try:
            ready.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    pool = [threading.Thread(target=one, args=(n,)) for n in range(THREADS)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if failures:
        raise failures[0]
