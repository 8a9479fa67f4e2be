# Provides GTest::gtest and GTest::gtest_main: the installed package first, else the source is downloaded.
find_package(GTest 1.11 QUIET)
if(GTest_FOUND)
  message(STATUS "GoogleTest: installed (${GTest_DIR})")
  return()
endif()

message(STATUS "GoogleTest: not installed, downloading 1.14.0 (Debian: apt-get install libgtest-dev)")
if(POLICY CMP0135)
  cmake_policy(SET CMP0135 NEW)
endif()
include(FetchContent)
FetchContent_Declare(googletest
  URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
  URL_HASH SHA256=8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
FetchContent_MakeAvailable(googletest)
if(NOT TARGET GTest::gtest)
  add_library(GTest::gtest ALIAS gtest)
  add_library(GTest::gtest_main ALIAS gtest_main)
endif()
