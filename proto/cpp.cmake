# The messages of proto/ in C++ (embertide_proto), its services (embertide_grpc), those of the
# inference protocol (embertide_inference), of spans (embertide_otlp), and a node's options as
# structs (embertide_settings). Included by backend_cpp.
find_package(Protobuf REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(GRPC REQUIRED IMPORTED_TARGET grpc++)
find_program(EMBERTIDE_GRPC_PLUGIN grpc_cpp_plugin REQUIRED)
set(generated ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(proto ${PROJECT_SOURCE_DIR}/proto)
file(MAKE_DIRECTORY ${generated})
foreach(name update plan snapshot node control key_sample)
  add_custom_command(
    OUTPUT ${generated}/embertide/v1/${name}.pb.cc ${generated}/embertide/v1/${name}.pb.h
    COMMAND protobuf::protoc -I ${proto} --cpp_out=${generated} embertide/v1/${name}.proto
    DEPENDS ${proto}/embertide/v1/${name}.proto VERBATIM)
  list(APPEND messages
    ${generated}/embertide/v1/${name}.pb.cc ${generated}/embertide/v1/${name}.pb.h)
endforeach()
foreach(name node control)
  add_custom_command(
    OUTPUT ${generated}/embertide/v1/${name}.grpc.pb.cc ${generated}/embertide/v1/${name}.grpc.pb.h
    COMMAND protobuf::protoc -I ${proto} --plugin=protoc-gen-grpc=${EMBERTIDE_GRPC_PLUGIN}
      --grpc_out=${generated} embertide/v1/${name}.proto
    DEPENDS ${proto}/embertide/v1/${name}.proto VERBATIM)
  list(APPEND services
    ${generated}/embertide/v1/${name}.grpc.pb.cc ${generated}/embertide/v1/${name}.grpc.pb.h)
endforeach()
# The open inference protocol, which the front speaks.
foreach(name model_config messages)
  add_custom_command(
    OUTPUT ${generated}/inference/${name}.pb.cc ${generated}/inference/${name}.pb.h
    COMMAND protobuf::protoc -I ${proto} --cpp_out=${generated} inference/${name}.proto
    DEPENDS ${proto}/inference/messages.proto ${proto}/inference/model_config.proto VERBATIM)
  list(APPEND inference ${generated}/inference/${name}.pb.cc ${generated}/inference/${name}.pb.h)
endforeach()
# Spans of OpenTelemetry, which the front sends.
foreach(part "" .grpc)
  list(APPEND otlp ${generated}/otlp/trace${part}.pb.cc ${generated}/otlp/trace${part}.pb.h)
endforeach()
add_custom_command(OUTPUT ${otlp}
  COMMAND protobuf::protoc -I ${proto} --plugin=protoc-gen-grpc=${EMBERTIDE_GRPC_PLUGIN}
    --cpp_out=${generated} --grpc_out=${generated} otlp/trace.proto
  DEPENDS ${proto}/otlp/trace.proto VERBATIM)
# A node's options: protoc reads the declaration, and a program of ours makes C++ of it.
set(options ${generated}/embertide/v1/options.pb.cc)
set(settings ${generated}/embertide/settings.h)
add_custom_command(OUTPUT ${options} ${generated}/embertide/v1/options.pb.h
  COMMAND protobuf::protoc -I ${proto} --cpp_out=${generated} embertide/v1/options.proto
  DEPENDS ${proto}/embertide/v1/options.proto VERBATIM)
add_executable(write_options ${proto}/write_options.cc ${options})
target_include_directories(write_options SYSTEM PRIVATE ${generated})
target_link_libraries(write_options PRIVATE protobuf::libprotobuf)
add_custom_command(OUTPUT ${settings} COMMAND write_options ${settings}
  DEPENDS write_options VERBATIM)
add_custom_target(embertide_write_settings DEPENDS ${settings})
add_library(embertide_settings INTERFACE)
target_include_directories(embertide_settings SYSTEM INTERFACE ${generated})
add_dependencies(embertide_settings embertide_write_settings)
add_custom_target(embertide_generated DEPENDS ${messages} ${services} ${inference} ${otlp} ${settings})
add_library(embertide_inference STATIC ${inference})
target_include_directories(embertide_inference SYSTEM PUBLIC ${generated})
target_link_libraries(embertide_inference PUBLIC protobuf::libprotobuf)
add_library(embertide_otlp STATIC ${otlp})
target_include_directories(embertide_otlp SYSTEM PUBLIC ${generated})
target_link_libraries(embertide_otlp PUBLIC protobuf::libprotobuf PkgConfig::GRPC)
add_library(embertide_proto STATIC ${messages})
target_include_directories(embertide_proto SYSTEM PUBLIC ${generated})
target_link_libraries(embertide_proto PUBLIC protobuf::libprotobuf)
add_library(embertide_grpc STATIC ${services})
target_link_libraries(embertide_grpc PUBLIC embertide_proto PkgConfig::GRPC)
if(EMBERTIDE_BUILD_FUZZ)
  # What protoc has made is there to reach ours through; without sanitizers it compiles sooner.
  foreach(target embertide_proto embertide_grpc)
    target_compile_options(${target} PRIVATE -fno-sanitize=address,undefined)
  endforeach()
endif()
