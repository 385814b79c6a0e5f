"""planted_code.py in a process whose kernel has no Landlock."""

from gateway import confinement
from gateway.child import serve
from tests.gateway.planted_code import prepare

if __name__ == "__main__":
    confinement.landlock_version = lambda: -1
    serve(prepare)
