#define CATCH_CONFIG_RUNNER  // version 2: the implementation goes into this file

#include "catch.h"

int main(int argc, char* argv[]) { return Catch::Session().run(argc, argv); }
