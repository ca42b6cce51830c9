# Compiles with the C++ compiler of the PyPI package ziglang, for glibc 2.17 on the processor MUSTER_WHEEL_MACHINE.
# Its libc++ is linked statically.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $ENV{MUSTER_WHEEL_MACHINE})

set(CMAKE_CXX_COMPILER $ENV{MUSTER_ZIG} c++ -target $ENV{MUSTER_WHEEL_MACHINE}-linux-gnu.2.17)
set(CMAKE_CXX_ARCHIVE_CREATE "$ENV{MUSTER_ZIG} ar qcs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,--strip-all")
# nanobind's headers use stderr, which Python.h no longer brings with the stable ABI and libc++ never did.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h -Wno-macro-redefined")
